"""What is in a store and its pairs, as figures, checks and a page; nothing else imports it."""

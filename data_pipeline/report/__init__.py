"""Report what is in a token store and its pairs, as figures, checks and an HTML page."""

"""Where text comes from: readers, files, and which of the text is taken."""

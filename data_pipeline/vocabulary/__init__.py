"""Train a WordPiece vocabulary, or read an existing one, and measure how well it fits."""

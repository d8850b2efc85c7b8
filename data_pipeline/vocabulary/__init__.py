"""text -> words -> WordPiece: training, existing vocabularies, and how well one fits."""

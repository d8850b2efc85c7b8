"""token store -> pairs -> masks -> batches: all that training needs of the data."""

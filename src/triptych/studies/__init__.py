"""Studies: variants of a recipe compared."""

"""What a run is: the schema, and reading a recipe into it with every problem reported at once. Imports no torch."""

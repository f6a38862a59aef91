"""Programs in completions, and tests of them.

`cases` reads the tests of a row, `judging` runs them. The modules `source`, `program`, `solution`, `checker`, `peer` and `values`
run in confined processes: they import the standard library alone (`values` numpy too, where a program has).
"""

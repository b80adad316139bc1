"""The command line: a module per command, to parse arguments, call the library and print.

`main.py` has the list of commands. `signatures.py` parses a command's function and the library functions
named in its signature, without importing them; `verbs.py` makes options of them. `terminal.py` prints,
`outputs.py` protects existing files, `failures.py` converts any error to a line and an exit code, and
`interrupts.py` handles Ctrl-C. `process.py` has process-wide settings. Start with `generate.py` as an
example.

Interface: `interrupts`.
"""

"""The command line: a module per command, which parses, calls the library and prints.

`main.py` has the list of commands. `signatures.py` reads a command's function, and the functions of the
library that it names, without importing them; `verbs.py` makes options of them. `terminal.py` prints,
`outputs.py` decides which files may be written, `failures.py` turns any error into a line and an exit
code, and `interrupts.py` Ctrl-C. `process.py` sets what belongs to the whole process. Start with
`generate.py` as an example.

Interface: `interrupts`.
"""

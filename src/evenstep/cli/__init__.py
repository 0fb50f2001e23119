"""The command `evenstep`: one thin file per command, arguments in and one call out.

Reading order:

1. `main` finds the command, imports its file only then, calls it, and prints the user's mistakes. `commands` lists the
   commands.
2. `run`, `doctor`, `verify`, `bench`, `estimate`, `convert`, `checkpoint`, `env`: each has a `build_parser()`, and a
   `main(arguments)` that parses, calls the room that does the work, and returns the exit status.
3. `arguments`: the class of all commands' parsers, which reports wrong calls, and types of arguments.
"""

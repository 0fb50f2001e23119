"""The command `evenstep`: one thin file per command, arguments in and one call out.

Reading order:

1. `main` finds the command and calls its file, which is imported only then; it prints the user's mistakes. `commands`
   lists them.
2. `run`, `doctor`, `verify`, `bench`, `estimate`, `convert`, `checkpoint`, `env`: each has a `build_parser()`, and a
   `main(arguments)` that parses, calls the room that does the work, and returns the exit status.
3. `arguments`: the parser of all of them, which reports a wrong call, and types of arguments.
"""

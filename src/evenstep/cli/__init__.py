"""The command `evenstep`: one thin file per command, arguments in and one call out.

Reading order:

1. `main` finds the command and calls its file, which is imported only then; it prints the user's mistakes.
2. `run`, `env`, `jobs`, `estimate`, `checkpoint`, `verify`, `doctor`, `convert`, `bench`: each has a
   `main(arguments)` that parses, calls the room that does the work, and returns the exit status. The flags of `run` and
   `bench` are those rooms' own.
3. `arguments`: types of arguments that several commands share.
"""

"""The command `evenstep`. That this module is loaded has the package import torch only where a command needs it."""


def main() -> int:
    """Run the command line of this process and return its exit status."""
    from evenstep.cli.main import main as run

    return run()

"""The command ``python -m torchgpipe.testing.dry_run SCRIPT --devices 8 --device a100-40gb``."""

from torchgpipe.testing.dry_run.script import main

__all__: list[str] = []

if __name__ == "__main__":
    main()

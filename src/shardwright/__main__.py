"""Makes ``python -m shardwright`` the command ``shardwright``."""

from shardwright.cli import main

if __name__ == "__main__":
    main()

"""Text for people and JSON for programs, made of the dataclasses of the library."""

"""Dataclasses as text for people and JSON for programs; strings in, strings out."""

"""What comparisons find, in short."""


def whats(found):
    return {row.name: row.what for row in (*found.changed, *found.values)}

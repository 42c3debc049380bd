"""A user who presses Ctrl-C while a study prints its progress."""

import io

from rich.console import Console


class InterruptedAt(Console):
    """A console that is interrupted after a line that begins with `last`; it records all text."""

    def __init__(self, last):
        super().__init__(record=True, width=200, file=io.StringIO(), markup=False)
        self.last = last

    def print(self, *objects, **more):
        super().print(*objects, **more)
        if str(objects[0]).startswith(self.last):
            raise KeyboardInterrupt

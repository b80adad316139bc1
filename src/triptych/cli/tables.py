"""Tables on the terminal."""

from rich.console import Console

from triptych.reports import Table, render_table


def print_whole(table: Table, console: Console) -> None:
    """Print a table, no number cut off: a narrow terminal gets the columns in parts, a file has the room."""
    rendered = render_table(table)
    width = console.measure(rendered, options=console.options.update(max_width=1000)).maximum
    if not console.is_terminal:
        console.width = max(console.width, width)
    if width <= console.width or len(table.columns) <= 2:
        console.print(rendered)
        return
    middle = (len(table.columns) + 1) // 2
    for part in (range(1, middle), range(middle, len(table.columns))):
        print_whole(table.part((0, *part)), console)

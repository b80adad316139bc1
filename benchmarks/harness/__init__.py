"""What every table needs: worker processes that take turns, figures, the machine, the page."""

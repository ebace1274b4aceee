"""What only one paper needs: its analyses and its page."""

"""The pages; and programs that make pages and pictures from the code, or run what the pages show."""

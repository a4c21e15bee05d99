"""The pages of reports, as HTML."""

"""The plots of a report, as plain data for plotly.js."""

"""What a report shows, read from the files of a run and computed: nothing is drawn here."""

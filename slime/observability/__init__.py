"""What a run shows: `console` while it goes on, `trackers` on disk, `report` at its end."""

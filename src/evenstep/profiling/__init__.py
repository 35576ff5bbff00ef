"""Where the time of a training went: recorded, added up, and put into words."""

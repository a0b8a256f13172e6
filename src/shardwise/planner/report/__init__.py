"""Reports of a plan: one self-contained HTML page, and a Chrome trace of the schedule."""

"""A live page of the runs in a folder, on this machine only: `scripts/dashboard.py`.

`guard` is what every request passes, `readings` what is shown, `actions` what may be asked for, `pages` the pages, and
`server` puts them together.
"""

HOST = "127.0.0.1"

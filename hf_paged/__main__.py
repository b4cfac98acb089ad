"""`python -m hf_paged`."""

from .cli import main

raise SystemExit(main())

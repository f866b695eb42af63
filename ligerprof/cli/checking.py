"""The option of fit and advise: simulated steps, or only the analytic estimate."""

import click

simulate_option = click.option(
    "--simulate/--no-simulate",
    default=True,
    show_default=True,
    help="Check answers by simulated steps (seconds each), or use only the analytic estimate.",
)

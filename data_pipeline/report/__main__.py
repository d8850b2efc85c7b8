"""Write the data report: `python -m data_pipeline.report CONFIG [key=value ...]`."""

from data_pipeline.common.errors import run_command
from data_pipeline.report.page import main

if __name__ == "__main__":
    run_command(main)

"""The report of a sweep: tables in the shape of the papers, figures, published numbers beside ours; one MLflow run with kind=report."""

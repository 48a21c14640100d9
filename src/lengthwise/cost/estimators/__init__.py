"""From measured points to cost tables: several estimators, judged by points they have not seen."""

__all__: list[str] = []

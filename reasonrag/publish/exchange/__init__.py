"""Exchange with other tools: export a run's pairs and questions, import published preferences.

An exporter turns a finished run into a folder of files; an importer turns a file and an optional held-out file into a
folder that `dpo train --data` reads. Both return the number of rows by split.
"""

from __future__ import annotations

from collections.abc import Callable

from reasonrag.publish.exchange.exporters import EXPORTERS as EXPORTERS
from reasonrag.publish.exchange.importers import import_proguide, import_trl

# Called with the file, the folder and `test`, a held-out file or None. The counts are `train`, `test` if there is a
# held-out file, `set_aside`, and further ones of an importer.
IMPORTERS: dict[str, Callable[..., dict[str, int]]] = {"proguide": import_proguide, "trl": import_trl}

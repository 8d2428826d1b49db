"""Exchange with other tools: export a run's pairs and questions, import published preferences and agents' logs.

An exporter turns a finished run into a folder of files; an importer turns a file into a folder that `dpo train --data`
or `build-tree --recording` reads. Both return numbers of rows.
"""

from __future__ import annotations

from collections.abc import Callable

from reasonrag.publish.exchange.exporters import EXPORTERS as EXPORTERS
from reasonrag.publish.exchange.importers import import_proguide, import_trl
from reasonrag.publish.exchange.inspect_log import import_inspect

# Called with the file and the folder; those of preferences take `test` too, a held-out file or None, and return the
# counts `train`, `test` if there is a held-out file, `set_aside`, and further ones.
IMPORTERS: dict[str, Callable[..., dict[str, int]]] = {
    "inspect": import_inspect,
    "proguide": import_proguide,
    "trl": import_trl,
}

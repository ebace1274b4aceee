"""Opens each kind of declared source."""

from collections.abc import Iterator

from dpx import packages
from dpx.data.csv_table import TableSource
from dpx.data.declared_data import Embedded, Hub, RandomRows, Synthetic, SyntheticLabels, TextFiles
from dpx.data.declared_data import Source as DeclaredSource
from dpx.data.documents import Document, Example, Prompted, Source
from dpx.data.embedded import EmbeddedSource
from dpx.data.hub import HubSource
from dpx.data.labelled import Table
from dpx.data.schema import PackageSource
from dpx.data.synthetic import SyntheticLabelsSource, SyntheticSource
from dpx.data.text_files import TextFilesSource
from dpx.declaration import ConfigError


class _OfPackage:
    """Adapts a package's source to `Source`; its fingerprint also covers the version of the package."""

    def __init__(self, declared: PackageSource):
        self._kind, self._source = type(declared), declared.open()

    def documents(self) -> Iterator[Document] | Iterator[Example] | Iterator[Prompted]:
        return self._source.documents()

    def fingerprint(self) -> str:
        kind = self._kind
        version = packages.version_of(kind.__module__.partition(".")[0])
        return f"{kind.__module__}.{kind.__qualname__} {version} {self._source.fingerprint()}"


def parts_of(source: Source) -> list[str]:
    """Returns a checksum of each whole file that a source reads; that of the whole source if it does not read files."""
    return source.parts() if isinstance(source, TextFilesSource | TableSource) else [source.fingerprint()]


def open_source(declared: DeclaredSource) -> Source:
    """Returns the reader of a declared source."""
    match declared:
        case Embedded():
            return EmbeddedSource()
        case TextFiles():
            return TextFilesSource(declared)
        case Table():
            return TableSource(declared)
        case Synthetic():
            return SyntheticSource(declared)
        case SyntheticLabels():
            return SyntheticLabelsSource(declared)
        case Hub():
            return HubSource(declared)
        case PackageSource():
            return _OfPackage(declared)
        case RandomRows():
            raise ConfigError(
                "data.source.kind=random",
                "random rows contain nothing that a model can learn",
                "Use job=benchmark, job=plan with data.declared_size=<rows>, or another data",
            )

"""The README's tree names every directory of the package, with its lines of Python within a tenth.

python -m tests.test_directories    # writes today's numbers
"""

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
README = REPOSITORY / "README.md"
# `    data/    715  a sentence`: in the package where it is indented, else at the top
ROW = re.compile(r"^((?:    )?)(\w+(?:/|\.py))( +[\d,]+)(?=  \w)", flags=re.MULTILINE)


def count_lines(path: Path) -> int:
    files = [path] if path.is_file() else path.rglob("*.py")
    return sum(file.read_text().count("\n") for file in files)


def find(row: re.Match) -> Path:
    return REPOSITORY / ("lightning_mgpu" if row[1] else "") / row[2]


def rewrite(row: re.Match) -> str:
    return f"{row[1]}{row[2]}{count_lines(find(row)):{len(row[3])},}"


def test_the_numbers_of_lines() -> None:
    # some directories can be deleted
    rows = [row for row in ROW.finditer(README.read_text()) if find(row).exists()]
    packages = {path.parent for path in REPOSITORY.glob("lightning_mgpu/*/__init__.py")}
    assert packages < {find(row) for row in rows}
    for row in rows:
        written = int(row[3].replace(",", ""))
        lines = count_lines(find(row))
        assert abs(written - lines) <= lines / 10, f"run {__doc__.splitlines()[2]}: {rewrite(row)}"


if __name__ == "__main__":
    README.write_text(ROW.sub(rewrite, README.read_text()))

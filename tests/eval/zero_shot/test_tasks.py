"""Zero-shot tasks: the table's definitions, local rows against the stock tasks, the prefetch."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import datasets
import lm_eval.tasks
import pytest
from lm_eval.tasks import TaskManager

from cat_lm.core.errors import UserError
from eval.zero_shot.tasks import catalog, sources, table2
from eval.zero_shot.tasks.catalog import Catalog
from eval.zero_shot.tasks.prefetch import prefetch
from eval.zero_shot.tasks.rows import check_answers
from eval.zero_shot.tasks.sources import Hub, LocalFolder
from tests.conftest import REPOSITORY
from tests.zero_shot_rows import ROWS, write_rows

HUB = {
    "wikitext": ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1"),
    "lambada_standard": ("cimec/lambada", None),
    "lambada_openai": ("EleutherAI/lambada_openai", "default"),
    "piqa": ("baber/piqa", None),
    "hellaswag": ("Rowan/hellaswag", None),
    "winogrande": ("allenai/winogrande", "winogrande_xl"),
    "arc_easy": ("allenai/ai2_arc", "ARC-Easy"),
    "arc_challenge": ("allenai/ai2_arc", "ARC-Challenge"),
}
SPLITS = ("train", "validation", "test")


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_rows(tmp_path / "rows")


@functools.cache
def stock_manager() -> TaskManager:
    root = Path(lm_eval.tasks.__file__).parent
    names = ("arc", "hellaswag", "lambada", "piqa", "wikitext", "winogrande")
    return TaskManager(include_defaults=False, include_path=[root / name for name in names])


def stock_task(name, rows, monkeypatch):
    """Load the harness's task as the harness does, but with `rows` in place of the Hub's."""

    def load_dataset(path, name=None, **_):
        assert (path, name) == HUB[task]
        return dict.fromkeys(SPLITS, datasets.Dataset.from_list(rows))

    task = name
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return stock_manager().load([name])["tasks"][name]


def prompts(task, limit=None):
    """Return every request in order and every row's target."""
    task.set_config("num_fewshot", 0)
    task.build_all_requests(limit=limit, rank=0, world_size=1)
    requests = [(i.doc_id, i.idx, i.request_type, i.args) for i in task.instances]
    return requests, [task.doc_to_target(doc) for _, doc in task.doc_iterator(limit=limit)]


def test_table_has_the_papers_columns_and_average():
    """Seven accuracies: their mean gives every printed average."""
    path = REPOSITORY / "eval/report/paper_table2.json"
    paper = json.loads(path.read_text(encoding="utf-8"))
    assert [*table2.COLUMNS, "average"] == paper["columns"]
    assert list(table2.AVERAGED) == paper["accuracies"]
    normalised = {task for task, metric in table2.COLUMNS.values() if metric == "acc_norm"}
    assert normalised == {"hellaswag", "arc_challenge"}
    rows = [row for row in paper["rows"] if row["average"] is not None]
    assert len(rows) == 5 and rows[0]["model"] == "Pythia" and rows[0]["average"] == 0.405
    for row in rows:
        tasks: dict = {}
        for column, (task, metric) in table2.COLUMNS.items():
            values = tasks.setdefault(task, {"metrics": {}, "stderr": {}})
            values["metrics"][metric], values["stderr"][metric] = row[column], 0.7
        average = table2.average(tasks)
        assert round(average["value"], 3) == row["average"], row["model"]
        assert average["stderr"] == pytest.approx(0.7 / 7**0.5)
        del tasks["winogrande"]
        assert table2.average(tasks)["value"] is None


@pytest.mark.parametrize("name", table2.TASKS)
def test_local_rows_make_the_stock_tasks_prompts(name, folder, monkeypatch):
    stock = stock_task(name, ROWS[name], monkeypatch)
    wanted = {metric for other, metric in table2.COLUMNS.values() if other == name}
    assert wanted <= set(stock.aggregation())
    monkeypatch.setattr(datasets, "load_dataset", None)
    local = Catalog([name]).load(name, LocalFolder(folder))
    assert prompts(local) == prompts(stock) and len(prompts(local)[1]) == len(ROWS[name])
    of_data = {"training_split", "validation_split", "fewshot_split", "fewshot_config"}
    a, b = ({k: v for k, v in t.dump_config().items() if k not in of_data} for t in (local, stock))
    assert a == b and local.aggregation() == stock.aggregation()
    assert local.higher_is_better() == stock.higher_is_better()


# Two tasks have some hundred rows; the others have thousands, or are read as these are.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("piqa", "winogrande") else pytest.mark.long)
        for name in table2.TASKS
    ],
)
def test_real_rows_make_the_stock_tasks_prompts_and_have_answers(name, shared_data, monkeypatch):
    path = shared_data / "benchmarks" / f"{name}.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    stock = stock_task(name, [json.loads(line) for line in lines], monkeypatch)
    local = load(name, LocalFolder(path.parent))
    assert len(local.eval_docs) == len(stock.eval_docs) == len(lines)
    assert prompts(local, 400) == prompts(stock, 400)


def load(name, source, **changes):
    """Load a task and check its answers, as a run does."""
    catalog = Catalog([name])
    catalog.specs[name] |= changes
    task = catalog.load(name, source)
    check_answers(task, source, sources.needed_splits(task.config), None)
    return task


def test_fewshot_examples_come_from_their_split_and_are_checked(folder):
    source = LocalFolder(folder)
    with pytest.raises(UserError, match=r"piqa\.train\.jsonl: missing"):
        load("piqa", source, num_fewshot=2)
    (folder / "piqa.train.jsonl").write_bytes((folder / "piqa.jsonl").read_bytes())
    task = load("piqa", source, num_fewshot=2)
    task.set_fewshot_seed(1)
    task.build_all_requests(rank=0, world_size=1)
    assert task.instances[0].args[0].count("Question: ") == 3
    assert set(source.records["piqa"]["files"]) == {"piqa.jsonl", "piqa.train.jsonl"}
    rows = write_rows(folder / "more", {"piqa": changed("piqa", {"label": -1})})
    (folder / "piqa.train.jsonl").write_bytes((rows / "piqa.jsonl").read_bytes())
    with pytest.raises(UserError, match=r"piqa\.train\.jsonl, line 3: answer -1"):
        load("piqa", source, num_fewshot=2)


def test_hash_of_rows_depends_on_values_alone(folder):
    def digest():
        return sources.rows_sha256(load("piqa", LocalFolder(folder)))

    first, path = digest(), folder / "piqa.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    swapped = [dict(reversed(row.items())) for row in rows]
    path.write_text("\n\n".join(map(json.dumps, swapped)), encoding="utf-8")
    assert digest() == first
    rows[4]["label"] = 1 - rows[4]["label"]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert digest() != first


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"piqa\.jsonl: has no rows"),
        (b'{"goal": "x"}\n{"goal": \n', r"piqa\.jsonl, line 2: is not JSON"),
        (b'{"goal": "x"}\n', r"task piqa: .*piqa\.jsonl, line 1: .*definition cannot read it"),
        (b'{"goal": "x"}\n{"goal": [1]}\n', r"piqa\.jsonl: rows differ in their columns"),
        (b'{"goal": "x"}\n\n{"sol1": "x"}\n', r"line 3: rows differ .*: goal, sol1 not in all"),
    ],
)
def test_damaged_rows_are_named(folder, content, message):
    (folder / "piqa.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        load("piqa", LocalFolder(folder))
    assert "\n" not in str(error.value)


# A task of the table, what is wrong with its third row, and the decisive words.
_HIDDEN = "the answer is hidden"
BAD_ROWS = [
    ("piqa", {"label": -1}, f"answer -1: {_HIDDEN}"),
    ("piqa", {"label": 7}, "answer 7: must be one of its 2 choices"),
    ("piqa", {"label": None}, f"answer null: {_HIDDEN}"),
    ("piqa", {"sol2": " "}, "each must be a text that is not blank"),
    ("hellaswag", {"label": "4"}, "answer 4: must be one of its 4 choices"),
    ("hellaswag", {"endings": ["a", "b", "c", "[x]"]}, "each must be a text that is not blank"),
    ("winogrande", {"answer": ""}, "definition cannot read it (KeyError"),
    ("winogrande", {"sentence": "no gap"}, "definition cannot read it (ValueError"),
    ("arc_easy", {"answerKey": "E"}, "'E' is not in list"),
    ("arc_challenge", {"choices": {"text": ["a"], "label": ["C"]}}, "at least two"),
    ("lambada_openai", {"text": "it ends "}, 'its answer is " "'),
    ("lambada_standard", {"text": None}, "definition cannot read it"),
    ("wikitext", {"page": "\n"}, 'its answer is "'),
]


def changed(name, change):
    rows = [dict(row) for row in ROWS[name]]
    rows[2] |= change
    return rows


@pytest.mark.parametrize(("name", "change", "message"), BAD_ROWS)
def test_rows_that_cannot_be_scored_are_named(tmp_path, name, change, message):
    folder = write_rows(tmp_path, {name: changed(name, change)})
    with pytest.raises(UserError) as error:
        load(name, LocalFolder(folder))
    said = str(error.value)
    assert f"task {name}: task data {folder / name}.jsonl, line 3: " in said and message in said


def test_rows_of_the_hub_are_named_by_split_and_number(monkeypatch):
    FakeHub(monkeypatch)
    monkeypatch.setitem(ROWS, "piqa", changed("piqa", {"label": -1}))
    with pytest.raises(UserError, match=r"the Hub's baber/piqa, split validation, row 2: answer"):
        load("piqa", Hub())


@pytest.mark.parametrize(
    ("changes", "row", "message"),
    [
        ({}, {"label": 2}, "answer 2: must be one of its 2 choices"),
        ({"doc_to_target": "weight"}, {}, "answer 0.0: must be one of"),
        ({"doc_to_target": "{{'no' if label < 2 else ''}}"}, {"label": 5}, 'answer "": the'),
        ({"doc_to_target": "{{[0, label]}}"}, {"label": 2}, r"answer \[0, 2\]: must be one"),
        ({"doc_to_choice": "{{[label]}}"}, {}, "must have at least two"),
        ({"doc_to_choice": "options"}, {"options": ["a", ""]}, "a text that is not blank"),
        ({"doc_to_choice": "{{question.nothing.at_all}}"}, {}, "definition cannot read it"),
        (
            {"output_type": "loglikelihood", "doc_to_choice": None, "metric_list": None}
            | {"doc_to_target": "question"},
            {"question": ""},
            'its answer is ""',
        ),
    ],
)
@pytest.mark.parametrize("number", [0, 2])
def test_answers_of_custom_tasks_are_checked(tmp_path, changes, row, message, number):
    rows = [
        {"question": f"{n}?", "label": n % 2, "weight": n * 0.5, "options": ["a", "b"]}
        for n in range(4)
    ]
    rows[number] |= row
    source = LocalFolder(write_rows(tmp_path, {"mine": rows}))
    config = {
        "task": "mine",
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_target": "label",
        "doc_to_choice": ["no", "yes"],
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    # Where all rows are wrong, the first one is named.
    line = number + 1 if row else 1
    with pytest.raises(UserError, match=rf"mine\.jsonl, line {line}: .*{message}"):
        task = sources.sourced_task(source)(config | changes)
        check_answers(task, source, ["test"], None)


class TestCatalog:
    @pytest.mark.long
    def test_groups_and_tags_stand_for_their_tasks(self, tmp_path):
        (tmp_path / "mine.yaml").write_text("task: mine")
        specs = Catalog(["ai2_arc", "blimp", "table2", "mine"], tmp_path).specs
        assert list(specs)[:2] == ["arc_challenge", "arc_easy"]
        assert set(specs) > {*table2.TASKS, "mine"}
        assert sum(name.startswith("blimp_") for name in specs) == 67

    def test_only_the_table_s_folders_are_read_for_its_tasks(self, monkeypatch):
        monkeypatch.setattr(catalog, "_whole_manager", None)
        assert list(Catalog(["arc_challenge_chat", "piqa"]).specs) == ["arc_challenge_chat", "piqa"]
        for name in ("ai2_arc", "helaswag"):  # A tag may have tasks elsewhere too.
            with pytest.raises(TypeError):
                Catalog(["piqa", name])

    def test_unknown_names_get_suggestions(self):
        with pytest.raises(UserError, match=r"--tasks helaswag: unknown; did you mean .*hellaswag"):
            Catalog(["piqa", "helaswag"])

    def test_custom_definitions_are_read_or_refused(self, tmp_path):
        rows = write_rows(tmp_path, {"mine": [{"q": f"{n}?", "a": n % 2} for n in range(4)]})
        definition = {
            "task": "mine",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(rows / "mine.jsonl")}},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{q}}",
            "doc_to_target": "a",
            "doc_to_choice": ["no", "yes"],
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }
        own = tmp_path / "definitions"
        own.mkdir()
        (own / "mine.yaml").write_text(json.dumps(definition))
        catalog, source = Catalog(["mine", "piqa"], own), Hub()
        requests, targets = prompts(catalog.load("mine", source))
        assert targets == [0, 1, 0, 1] and len(requests) == 8
        record = source.records["mine"]
        assert (record["revision"], record["files"]) == (None, {"test": str(rows / "mine.jsonl")})
        (rows / "mine.jsonl").unlink()
        with pytest.raises(UserError, match=r"task mine: the files that .*mine\.jsonl.* cannot be"):
            catalog.load("mine", Hub())
        for text, message in (
            (json.dumps(definition | {"task": "piqa"}), r"again\.yaml defines piqa, a task of tab"),
            ("task: again\ndoc_to_choice: [a", r"again\.yaml: is no definition: while parsing"),
            ("include: absent.yaml", r"again\.yaml: is no definition: .*absent\.yaml"),
        ):
            (own / "again.yaml").write_text(text)
            with pytest.raises(UserError, match=message) as error:
                Catalog(["mine"], own)
            assert "\n" not in str(error.value)


class FakeHub:
    """In the place of the download: every split of every task, and a commit that moves on."""

    def __init__(self, monkeypatch):
        self.asked, self.commit = [], "c1"
        monkeypatch.setattr(sources, "load_dataset", self.load)
        monkeypatch.setattr(sources, "newest_commit", lambda _, branch: f"{self.commit}-{branch}")

    def load(self, path, name=None, revision=None):
        (task,) = (task for task, place in HUB.items() if place == (path, name))
        self.asked.append((task, revision))
        if path == "cimec/lambada" and "parquet" not in revision:
            raise RuntimeError("Dataset scripts are no longer supported, but found lambada.py")
        other = datasets.Dataset.from_list(ROWS[task][:2])
        rows = datasets.Dataset.from_list(ROWS[task])
        test = {"wikitext", "lambada_standard", "lambada_openai", "arc_easy", "arc_challenge"}
        splits = {"train": other, "validation": other, "test": other}
        return splits | {"test" if task in test else "validation": rows}


class TestPrefetch:
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ('{"revisions": {}, "files": {}}', "has no format, must be 1"),
            ('{"format": 1, "revisions": {}, "files": {"../x": {}}}', "must be a path inside.*"),
            ('{"format": 1, "revisions": {}, "files": {"x": {}}}', "has no files.x.task"),
        ],
    )
    def test_damaged_manifest_is_one_line(self, folder, content, message):
        (folder / "manifest.json").write_text(content)
        with pytest.raises(UserError, match=f"manifest.json.*{message}.*; give a folder that"):
            LocalFolder(folder)

    def test_folder_equals_the_hub(self, tmp_path, monkeypatch):
        hub = FakeHub(monkeypatch)
        paths = prefetch(["table2"], tmp_path / "rows")
        assert [path.stem for path in paths] == list(table2.TASKS)
        for name in table2.TASKS:
            online, local_source = load(name, Hub()), LocalFolder(tmp_path / "rows")
            local = load(name, local_source)
            assert prompts(local) == prompts(online)
            assert sources.rows_sha256(local) == sources.rows_sha256(online)
            record = local_source.records[name]["files"][f"{name}.jsonl"]
            assert (record["dataset"], record["config"]) == HUB[name]
            branch = "refs/convert/parquet" if name == "lambada_standard" else "main"
            assert record["revision"] == f"c1-{branch}"
        assert len(hub.asked) == 2 * (len(table2.TASKS) + 1)

    def test_interrupted_prefetch_resumes_at_its_revisions(self, tmp_path, monkeypatch):
        hub = FakeHub(monkeypatch)

        def fails_for_hellaswag(path, *args, **options):
            if "hellaswag" in path:
                raise ConnectionError("Couldn't reach the Hub\nat all")
            return hub.load(path, *args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(sources, "load_dataset", fails_for_hellaswag)
            with pytest.raises(UserError, match=r"task hellaswag: Rowan/hellaswag cannot .*reach"):
                prefetch(["piqa", "winogrande", "hellaswag"], tmp_path)
        hub.commit = "c2"
        hub.asked.clear()
        (tmp_path / "piqa.jsonl").unlink()
        prefetch(["piqa", "winogrande", "hellaswag"], tmp_path)
        assert hub.asked == [("piqa", "c1-main"), ("hellaswag", "c2-main")]

    def test_changed_and_foreign_files_are_refused(self, tmp_path, monkeypatch):
        FakeHub(monkeypatch)
        (tmp_path / "piqa.jsonl").write_text("mine")
        with pytest.raises(UserError, match=r"--prefetch .*: piqa\.jsonl is not of an earlier run"):
            prefetch(["piqa"], tmp_path)
        assert (tmp_path / "piqa.jsonl").read_text() == "mine"
        (tmp_path / "piqa.jsonl").unlink()
        (path,) = prefetch(["piqa"], tmp_path)
        (tmp_path / "manifest.json").unlink()  # as after a kill before it was written
        assert prefetch(["piqa"], tmp_path) == [path]
        path.write_bytes(path.read_bytes().replace(b"warm", b"cold"))
        with pytest.raises(UserError, match=r"piqa\.jsonl: is not what .*manifest\.json says"):
            load("piqa", LocalFolder(tmp_path))

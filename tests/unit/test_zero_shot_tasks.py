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
from tests.zero_shot_rows import ROWS, write_rows

REPOSITORY = Path(__file__).parents[2]
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
    """The harness's task as it loads it itself, but with `rows` in the place of the Hub's."""

    def load_dataset(path, name=None, **_):
        assert (path, name) == HUB[task]
        return dict.fromkeys(SPLITS, datasets.Dataset.from_list(rows))

    task = name
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return stock_manager().load([name])["tasks"][name]


def prompts(task, limit=None):
    """Every request in order, every row's target, and what the metrics make of the answers."""
    task.set_config("num_fewshot", 0)
    task.build_all_requests(limit=limit, rank=0, world_size=1)
    requests = [(i.doc_id, i.idx, i.request_type, i.args) for i in task.instances]
    targets = [task.doc_to_target(doc) for _, doc in task.doc_iterator(limit=limit)]
    return requests, targets


class TestTable:
    def paper(self):
        return json.loads(
            (REPOSITORY / "eval/report/paper_table2.json").read_text(encoding="utf-8")
        )

    def test_average_is_the_papers(self):
        """Which seven: their mean gives every printed average, Pythia's 0.405 among them."""
        rows = [row for row in self.paper()["rows"] if row["average"] is not None]
        assert len(rows) == 5 and rows[0]["model"] == "Pythia" and rows[0]["average"] == 0.405
        for row in rows:
            tasks: dict = {}
            for column, (task, metric) in table2.COLUMNS.items():
                values = tasks.setdefault(task, {"metrics": {}, "stderr": {}})
                values["metrics"][metric] = row[column]
            average = table2.average(tasks)
            assert round(average["value"], 3) == row["average"], row["model"]
            assert len(average["of"]) == 7
            del tasks["winogrande"]
            assert table2.average(tasks)["value"] is None

    def test_columns_are_the_papers(self):
        paper = self.paper()
        assert [*table2.COLUMNS, "average"] == paper["columns"]
        assert list(table2.AVERAGED) == paper["accuracies"]
        assert all(set(paper["columns"]) < set(row) for row in paper["rows"])
        normalised = {task for task, metric in table2.COLUMNS.values() if metric == "acc_norm"}
        assert normalised == {"hellaswag", "arc_challenge"}

    def test_stderr_of_the_average(self):
        tasks = {task: {"metrics": {}, "stderr": {}} for task in table2.TASKS}
        for task, metric in table2.COLUMNS.values():
            tasks[task]["metrics"][metric] = tasks[task]["stderr"][metric] = 0.7
        assert table2.average(tasks)["stderr"] == pytest.approx(0.7 / 7**0.5)

    @pytest.mark.parametrize("name", table2.TASKS)
    def test_the_harness_has_the_metrics(self, name, monkeypatch):
        task = stock_task(name, ROWS[name], monkeypatch)
        wanted = {metric for other, metric in table2.COLUMNS.values() if other == name}
        assert wanted <= set(task.aggregation())


class TestLocalRows:
    @pytest.mark.parametrize("name", table2.TASKS)
    def test_prompts_are_the_stock_tasks(self, name, folder, monkeypatch):
        stock = stock_task(name, ROWS[name], monkeypatch)
        monkeypatch.setattr(datasets, "load_dataset", None)
        local = Catalog([name]).load(name, LocalFolder(folder))
        assert prompts(local) == prompts(stock)
        assert len(prompts(local)[1]) == len(ROWS[name])
        self.same_definition(local, stock)

    @staticmethod
    def same_definition(local, stock):
        of_data = {"training_split", "validation_split", "fewshot_split", "fewshot_config"}
        a, b = local.dump_config(), stock.dump_config()
        assert {k: v for k, v in a.items() if k not in of_data} == {
            k: v for k, v in b.items() if k not in of_data
        }
        assert local.aggregation() == stock.aggregation()
        assert local.higher_is_better() == stock.higher_is_better()

    # Some hundred rows; the others are thousands, or read as these are.
    @pytest.mark.parametrize(
        "name",
        [
            pytest.param(name, marks=() if name in ("piqa", "winogrande") else pytest.mark.long)
            for name in table2.TASKS
        ],
    )
    def test_real_rows(self, name, shared_data, monkeypatch):
        path = shared_data / "benchmarks" / f"{name}.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines()
        stock = stock_task(name, [json.loads(line) for line in lines], monkeypatch)
        local = Catalog([name]).load(name, LocalFolder(path.parent))
        assert len(local.eval_docs) == len(stock.eval_docs) == len(lines)
        assert prompts(local, 400) == prompts(stock, 400)

    def test_fewshot_examples_need_their_split(self, folder):
        source = LocalFolder(folder)
        catalog = Catalog(["piqa"])
        catalog.specs["piqa"]["num_fewshot"] = 2
        with pytest.raises(UserError, match=r"piqa\.train\.jsonl: missing"):
            catalog.load("piqa", source)
        (folder / "piqa.train.jsonl").write_bytes((folder / "piqa.jsonl").read_bytes())
        task = catalog.load("piqa", source)
        task.set_fewshot_seed(1)
        task.build_all_requests(rank=0, world_size=1)
        assert task.instances[0].args[0].count("Question: ") == 3
        assert set(source.records["piqa"]["files"]) == {"piqa.jsonl", "piqa.train.jsonl"}

    def test_hash_of_the_rows(self, folder):
        def digest():
            return sources.rows_sha256(Catalog(["piqa"]).load("piqa", LocalFolder(folder)))

        first = digest()
        path = folder / "piqa.jsonl"
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
            (b'{"goal": "\xff"}\n', r"piqa\.jsonl: is not UTF-8 text"),
            (b"[1]\n", r"line 1: holds \[1\], must be an object"),
            (b'{"goal": "x"}\n', r"task piqa: .*piqa\.jsonl, line 1: .*definition cannot read it"),
            (b'{"goal": "x"}\n{"goal": [1]}\n', r"piqa\.jsonl: rows differ in their columns"),
            (
                b'{"goal": "x"}\n\n{"sol1": "x"}\n',
                r"line 3: rows differ in their columns: goal, sol1 not in all of them",
            ),
            (b'{"goal": ' + b"[" * 9000, r"line 1: is nested too deeply"),
        ],
    )
    def test_bad_rows(self, folder, content, message):
        (folder / "piqa.jsonl").write_bytes(content)
        with pytest.raises(UserError, match=message) as error:
            Catalog(["piqa"]).load("piqa", LocalFolder(folder))
        assert "\n" not in str(error.value)


# A row of a task of the table, what is wrong with it, and what is said about it.
_HIDDEN = "the answer is hidden"
BAD_ROWS = [
    ("piqa", {"label": -1}, f"answer -1: {_HIDDEN}"),
    ("piqa", {"label": 7}, "answer 7: must be one of its 2 choices"),
    ("piqa", {"label": None}, f"answer null: {_HIDDEN}"),
    ("piqa", {"sol2": " "}, "each must be a text that is not blank"),
    ("hellaswag", {"label": "4"}, "answer 4: must be one of its 4 choices"),
    ("hellaswag", {"endings": ["a", "b", "c", "[x]"]}, "each must be a text that is not blank"),
    ("winogrande", {"answer": ""}, "definition cannot read it (KeyError"),
    ("winogrande", {"answer": "3"}, "definition cannot read it (KeyError"),
    ("winogrande", {"sentence": "no gap"}, "definition cannot read it (ValueError"),
    ("arc_easy", {"answerKey": ""}, "definition cannot read it (ValueError"),
    ("arc_easy", {"answerKey": "E"}, "'E' is not in list"),
    ("arc_challenge", {"choices": {"text": ["a"], "label": ["C"]}}, "at least two"),
    ("lambada_openai", {"text": "it ends "}, 'its answer is " "'),
    ("lambada_standard", {"text": None}, "definition cannot read it"),
    ("wikitext", {"page": "\n"}, 'its answer is "'),
]


class TestRowsThatCannotBeScored:
    """In any row of the split, not in its first alone, and before anything is scored."""

    @staticmethod
    def changed(name, change):
        rows = [dict(row) for row in ROWS[name]]
        rows[2] |= change
        return rows

    @staticmethod
    def check(name, source):
        task = Catalog([name]).load(name, source)
        check_answers(task, source, sources.needed_splits(task.config), None)

    @pytest.mark.parametrize(("name", "change", "message"), BAD_ROWS)
    def test_local_rows_are_named_by_file_and_line(self, tmp_path, name, change, message):
        folder = write_rows(tmp_path, {name: self.changed(name, change)})
        with pytest.raises(UserError) as error:
            self.check(name, LocalFolder(folder))
        said = str(error.value)
        assert f"task {name}: task data {folder / name}.jsonl, line 3: " in said and message in said

    def test_rows_of_the_hub_are_named_by_split_and_number(self, monkeypatch):
        FakeHub(monkeypatch)
        monkeypatch.setitem(ROWS, "piqa", self.changed("piqa", {"label": -1}))
        with pytest.raises(
            UserError, match=r"the Hub's baber/piqa, split validation, row 2: answer"
        ):
            self.check("piqa", Hub())

    @pytest.mark.parametrize(
        ("changes", "row", "message"),
        [
            ({}, {"label": -1}, "answer -1: the answer is hidden"),
            ({}, {"label": 2}, "answer 2: must be one of its 2 choices"),
            ({}, {"label": None}, "answer null: the answer is hidden"),
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
    def test_tasks_without_columns_of_their_own(self, tmp_path, changes, row, message, number):
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

    def test_examples_are_checked_too(self, folder):
        rows = write_rows(folder / "more", {"piqa": self.changed("piqa", {"label": -1})})
        (folder / "piqa.train.jsonl").write_bytes((rows / "piqa.jsonl").read_bytes())
        catalog = Catalog(["piqa"])
        catalog.specs["piqa"]["num_fewshot"] = 2
        source = LocalFolder(folder)
        task = catalog.load("piqa", source)
        with pytest.raises(UserError, match=r"piqa\.train\.jsonl, line 3: answer -1"):
            check_answers(task, source, sources.needed_splits(task.config), None)

    @pytest.mark.parametrize("name", table2.TASKS)
    def test_real_rows_can(self, name, shared_data):
        self.check(name, LocalFolder(shared_data / "benchmarks"))


class TestCatalog:
    def test_groups_and_tags_stand_for_their_tasks(self):
        assert list(Catalog(["table2"]).specs) == list(table2.TASKS)
        specs = Catalog(["ai2_arc", "blimp", "piqa"]).specs
        assert list(specs)[:2] == ["arc_challenge", "arc_easy"] and "piqa" in specs
        assert sum(name.startswith("blimp_") for name in specs) == 67

    def test_only_tasks_of_the_table_s_folders_are_found_without_reading_all(self, monkeypatch):
        """A tag or a group in them may have tasks elsewhere too."""

        def whole(include):
            raise LookupError("all of the harness's tasks")

        monkeypatch.setattr(catalog, "_whole_manager", whole)
        assert list(Catalog(["arc_challenge_chat", "piqa"]).specs) == ["arc_challenge_chat", "piqa"]
        for name in ("ai2_arc", "helaswag"):
            with pytest.raises(LookupError):
                Catalog(["piqa", name])

    def test_unknown_names_get_suggestions(self):
        with pytest.raises(UserError, match=r"--tasks helaswag: unknown; did you mean .*hellaswag"):
            Catalog(["piqa", "helaswag"])

    def test_custom_definitions(self, tmp_path):
        """A task of the harness's form with files of its own, read without the Hub."""
        rows = write_rows(tmp_path, {"mine": [{"q": f"{n}?", "a": n % 2} for n in range(4)]})
        definition = [
            "task: mine",
            "dataset_path: json",
            f"dataset_kwargs: {{data_files: {{test: {rows / 'mine.jsonl'}}}}}",
            "test_split: test",
            "output_type: multiple_choice",
            "doc_to_text: '{{q}}'",
            "doc_to_target: a",
            "doc_to_choice: ['no', 'yes']",
            "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]",
        ]
        (tmp_path / "definitions").mkdir()
        (tmp_path / "definitions/mine.yaml").write_text("\n".join(definition))
        catalog = Catalog(["mine", "piqa"], tmp_path / "definitions")
        source = Hub()
        requests, targets = prompts(catalog.load("mine", source))
        assert targets == [0, 1, 0, 1] and len(requests) == 8
        assert source.records["mine"]["revision"] is None
        assert "mine" in Catalog(["mine", "ai2_arc"], tmp_path / "definitions").specs
        assert source.records["mine"]["files"] == {"test": str(rows / "mine.jsonl")}
        (rows / "mine.jsonl").unlink()
        with pytest.raises(UserError, match=r"task mine: the files that .*mine\.jsonl.* cannot be"):
            catalog.load("mine", Hub())
        again = "\n".join(definition).replace("task: mine", "task: piqa")
        (tmp_path / "definitions/again.yaml").write_text(again)
        with pytest.raises(UserError, match=r"again\.yaml defines piqa, a task of table2"):
            Catalog(["mine"], tmp_path / "definitions")


class FakeHub:
    """In the place of the download: every split of every task, and a commit that moves on."""

    def __init__(self, monkeypatch):
        self.asked, self.commit = [], "c1"
        monkeypatch.setattr(sources, "load_dataset", self.load)
        monkeypatch.setattr(sources, "newest_commit", self.newest)

    def newest(self, dataset, branch):
        return f"{self.commit}-{branch}"

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
            ("[]", "holds \\[\\]: should be an object"),
            ('{"revisions": {}, "files": {}}', "has no format, must be 1"),
            ('{"format": 1, "revisions": {}}', "has no files"),
            ('{"format": 1, "revisions": {}, "files": {"../x": {}}}', "must be a path inside.*"),
            ('{"format": 1, "revisions": {}, "files": {"x": {}}}', "x: has no task"),
        ],
    )
    def test_a_manifest_of_another_shape_is_one_line(self, folder, content, message):
        (folder / "manifest.json").write_text(content)
        with pytest.raises(UserError, match=f"manifest.json.*{message}.*; give a folder that"):
            LocalFolder(folder)

    def test_folder_equals_the_hub(self, tmp_path, monkeypatch):
        hub = FakeHub(monkeypatch)
        paths = prefetch(["table2"], tmp_path / "rows")
        assert [path.stem for path in paths] == list(table2.TASKS)
        for name in table2.TASKS:
            online = Catalog([name]).load(name, Hub())
            local_source = LocalFolder(tmp_path / "rows")
            local = Catalog([name]).load(name, local_source)
            assert prompts(local) == prompts(online)
            assert sources.rows_sha256(local) == sources.rows_sha256(online)
            record = local_source.records[name]["files"][f"{name}.jsonl"]
            assert (record["dataset"], record["config"]) == HUB[name]
            branch = "refs/convert/parquet" if name == "lambada_standard" else "main"
            assert record["revision"] == f"c1-{branch}"
        assert len(hub.asked) == 2 * (len(table2.TASKS) + 1)

    def test_revisions_stay_pinned(self, tmp_path, monkeypatch):
        hub = FakeHub(monkeypatch)
        prefetch(["piqa", "winogrande"], tmp_path)
        hub.commit = "c2"
        hub.asked.clear()
        prefetch(["piqa", "winogrande"], tmp_path)
        assert hub.asked == []
        (tmp_path / "piqa.jsonl").unlink()
        prefetch(["piqa", "winogrande", "hellaswag"], tmp_path)
        assert hub.asked == [("piqa", "c1-main"), ("hellaswag", "c2-main")]

    def test_a_changed_file_is_refused(self, tmp_path, monkeypatch):
        FakeHub(monkeypatch)
        (path,) = prefetch(["piqa"], tmp_path)
        path.write_bytes(path.read_bytes().replace(b"warm", b"cold"))
        with pytest.raises(UserError, match=r"piqa\.jsonl: is not what .*manifest\.json says"):
            Catalog(["piqa"]).load("piqa", LocalFolder(tmp_path))

    def test_rows_of_the_users_own_are_not_replaced(self, tmp_path, monkeypatch):
        FakeHub(monkeypatch)
        (tmp_path / "piqa.jsonl").write_text("mine")
        with pytest.raises(UserError, match=r"--prefetch .*: piqa\.jsonl is not of an earlier run"):
            prefetch(["piqa"], tmp_path)
        assert (tmp_path / "piqa.jsonl").read_text() == "mine"
        (tmp_path / "piqa.jsonl").unlink()
        (path,) = prefetch(["piqa"], tmp_path)
        (tmp_path / "manifest.json").unlink()  # as where a call was killed before it
        assert prefetch(["piqa"], tmp_path) == [path]

    def test_interrupted(self, tmp_path, monkeypatch):
        hub = FakeHub(monkeypatch)
        download = hub.load

        def fails_for_hellaswag(path, *args, **options):
            if "hellaswag" in path:
                raise ConnectionError("Couldn't reach the Hub\nat all")
            return download(path, *args, **options)

        monkeypatch.setattr(sources, "load_dataset", fails_for_hellaswag)
        with pytest.raises(UserError, match=r"task hellaswag: Rowan/hellaswag cannot .*reach the"):
            prefetch(["piqa", "hellaswag"], tmp_path)
        monkeypatch.setattr(sources, "load_dataset", hub.load)
        hub.asked.clear()
        prefetch(["piqa", "hellaswag"], tmp_path)
        assert hub.asked == [("hellaswag", "c1-main")]

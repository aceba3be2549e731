"""The page of `explain`: the source of the program, with the dtype in which each line ran."""

import html
import html.parser
import pathlib
import re
import string
import sys
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jmp_lite as jmp
from examples.models import gpt2
from jmp_lite._text import shortened
from tests.support.jaxprs import equations

W, X = jnp.ones((32, 32)), jnp.ones((64, 32))
VOID = {"meta", "body", "i", "br", "td", "th", "tr", "table", "p"}  # Left open, or checked by the others.


class Lines(html.parser.HTMLParser):
    """Reads a page: the texts of each line of source, and the tags that were opened and not closed."""

    def __init__(self, page):
        super().__init__()
        self.rows, self.tags, self.open = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.open += [tag] if tag not in VOID else []
        if "line" in (dict(attrs).get("class") or "").split():
            self.rows.append([])
        if self.rows and tag == "span":
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.rows and self.open and self.rows[-1] and "span" in self.open:
            self.rows[-1][-1] += data

    def row(self, code):
        """Returns the texts of the one line of source that begins with some code."""
        (row,) = [row for row in self.rows if len(row) > 4 and row[4].strip().startswith(code)]
        return row


def page_of(fun, *args, **options):
    return shown(jmp.explain(jmp.autocast(fun, **options))(*args))


def shown(report):
    """Returns the page of a report that a notebook shows in a frame."""
    frame = re.fullmatch('<iframe srcdoc="([^"]*)" style="[^"]*"></iframe>', report._repr_html_(), re.DOTALL)
    return html.unescape(frame[1])


def test_a_line_shows_its_dtype_forwards_and_backwards_and_what_decided():
    def loss(w, x):
        h = x @ w + 1.0
        h = jnp.exp(h)
        h = h.reshape(-1)
        return jnp.sum(h)

    lines = Lines(page_of(jax.value_and_grad(loss), W, X, dtype="float16"))
    assert not lines.open
    number, *chips, share, _ = lines.row(
        "h = x @ w + 1.0"
    )  # The sum beside the matmul is in float32 backwards.
    assert int(number) > 1
    assert chips == ["f16 allow", "f16 allow"]
    assert 90 < float(share.rstrip("%")) <= 100
    assert lines.row("h = h.reshape(-1)")[3] == ""
    assert lines.row("h = jnp.exp(h)")[1:3] == ["f32 deny", "f32 infer"]
    assert lines.row("h = h.reshape(-1)")[1:3] == ["move", "move"]
    assert lines.row("return jnp.sum(h)")[1] == "f32 deny"


def test_a_line_that_a_rule_or_an_option_decided_says_which():
    def fun(w, x):
        with jax.named_scope("head"):
            a = x @ w
        b = jmp.full_precision(jnp.matmul)(x, w)
        c = jnp.tanh(jmp.keep_float32(x @ w))
        d = jnp.sin(a)
        return a, b, c, d

    lines = Lines(page_of(fun, W, X, dtype="float16", rules={"head": "float32"}, deny=["sin"]))
    assert lines.row("a = x @ w")[1] == "f32 rule"
    assert lines.row("a = x @ w")[5].endswith("the rule for 'head'")
    assert lines.row("b = jmp")[1] == "f32 option"
    assert "inside full_precision" in lines.row("b = jmp")[5]
    assert "keep_float32" in lines.row("c = jnp")[5]
    assert lines.row("d = jnp.sin")[1] == "f32 option"


def test_a_matmul_in_fp8_and_the_users_own_dtypes_are_named():
    w, x = jnp.ones((256, 256)), jnp.ones((256, 256))

    def fun(w, x):
        with jax.named_scope("big"):
            a = x @ w
        b = x.astype(jnp.float16) @ w.astype(jnp.float16)
        return a, b

    report = jmp.explain(jmp.autocast(fun, "float8", rules={"big": "float8"}))(w, x)
    lines = Lines(shown(report))
    assert any(operation.in_fp8 for operation in report.operations)
    assert lines.row("a = x @ w")[1].startswith("fp8")
    assert lines.row("b = x.astype")[1].startswith("f16")


def test_a_line_that_calls_a_package_stands_for_what_the_package_computes():
    model = nn.Dense(8)
    params = jax.eval_shape(model.init, jax.random.key(0), X)

    def loss(params, x):
        y = model.apply(params, x)
        return jnp.sum(y)

    report = jmp.explain(jmp.autocast(jax.value_and_grad(loss)))(params, X)
    (row,) = [each for each in report.operations if each.is_product and not each.backward]
    assert "linear.py" in row.source
    assert "test_page.py" in row.caller
    page = shown(report)
    assert Lines(page).row("y = model.apply")[1:3] == ["bf16 allow", "bf16 allow"]
    assert "linear.py" not in page.partition("As text")[0]


@pytest.mark.parametrize("scan", [False, True])
def test_the_direction_is_that_of_the_equation_in_loops_and_checkpoints_too(scan):
    @jax.checkpoint
    def layer(x, w):
        return jnp.tanh(x @ w)

    def loss(ws, x):
        if scan:
            x, _ = jax.lax.scan(lambda x, w: (jax.jit(layer)(x, w), None), x, ws)
        else:
            x = layer(x, ws[0])
        return jnp.sum(x)

    report = jmp.explain(jmp.autocast(jax.value_and_grad(loss)))(jnp.stack([W, W]), X)
    forward = [
        operation for operation in report.operations if operation.is_product and not operation.backward
    ]
    backward = [operation for operation in report.operations if operation.is_product and operation.backward]
    made = [each for each in equations(report.before) if each.primitive.name == "dot_general"]
    # The checkpoint computes the matmul again, beside the two of the gradients.
    assert (len(forward), len(backward)) == (1, len(made) - 1)
    assert len(backward) >= 2


def test_all_text_of_the_user_is_escaped():
    def fun(w, x):
        with jax.named_scope("<img src=x>&\"'"):
            return x @ w  # <script>alert("1")</script> &amp;

    page = page_of(fun, W, X)
    lines = Lines(page)
    assert not {"script", "img"} & set(lines.tags)
    assert "# &lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt; &amp;amp;" in page
    assert "&lt;img src=x&gt;" in page


def test_a_function_without_source_is_a_table():
    names = {"jnp": jnp}
    exec("fun = lambda w, x: jnp.exp(x @ w)", names)
    lines = Lines(page_of(names["fun"], W, X))
    rows = [row for row in lines.rows if "<string>:1" in "".join(row)]
    assert [row[1] for row in rows] == ["bf16 allow", "f32 deny"]
    assert not lines.open


def test_an_operation_of_a_function_of_jax_has_the_line_that_calls_it():
    def loss(w, x):
        a = jax.nn.log_softmax(x)
        b = jax.nn.log_softmax(x @ w)
        return jnp.sum(a + b)

    report = jmp.explain(jmp.autocast(jax.value_and_grad(loss)))(W, X)
    assert all("test_page.py" in operation.source for operation in report.operations)
    lines = Lines(shown(report))
    assert lines.row("a = jax")[1:3] == ["f32 deny", ""]
    assert lines.row("b = jax")[1:3] == ["bf16 allow", "bf16 allow"]


def test_a_file_that_changed_or_is_gone_makes_no_error(tmp_path):
    names = {"jnp": jnp}
    exec(compile("\n" * 99 + "fun = lambda w, x: x @ w", str(tmp_path / "gone.py"), "exec"), names)
    (tmp_path / "gone.py").write_text("# Now shorter.\n")
    report = jmp.explain(jmp.autocast(names["fun"]))(W, X)
    assert "gone.py" in shown(report)
    (tmp_path / "gone.py").unlink()
    assert "gone.py" in shown(report)


def test_a_program_without_floats_has_a_page():
    page = page_of(lambda x: x + 1, jnp.arange(3))
    assert "0 of 0 operations" in page
    assert not Lines(page).open


@pytest.mark.slow
def test_the_page_of_a_model_of_64_million_parameters_is_small_and_asks_no_server(tmp_path):
    model = gpt2.GPT2(width=512, layers=12, heads=8)
    tokens = jax.ShapeDtypeStruct((4, 1024), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    loss = lambda params, x, y: gpt2.loss(model.apply(params, x), y)
    path = tmp_path / "precision.html"
    jmp.explain(jmp.autocast(jax.value_and_grad(loss)))(params, tokens, tokens).save(path)
    page = path.read_text(encoding="utf-8")
    assert 10_000 < len(page.encode()) < 200_000
    assert not re.search(r'https?:|url\(|@import|src=|href="[^#]', page.partition("As text")[0])
    assert page.startswith("<!doctype html><meta charset")
    # The file with the most FLOPs comes first, and the modules by what is left in float32.
    files = re.findall(r"<summary>([^<]*\.py)", page)
    assert [file.rpartition("/")[2] for file in files][:2] == ["attention.py", "gpt2.py"]
    rows = re.findall(r'<tr><td><a href="#([^"]*)">([^<]*)</a><td>([\d.]+)%', page)
    left = [float(share) for *_, share in rows]
    assert left == sorted(left, reverse=True)
    # Equal layers are one row, and a row leads to the line that costs most.
    assert any(re.search(r"_0 … \w+_\d+/.*, 12 alike", name) for _, name, _ in rows)
    assert all(f'<a id="{anchor}"></a>' in page for anchor, *_ in rows)


def test_a_notebook_names_the_cell(monkeypatch):
    file = "/tmp/ipykernel_1/23.py"
    names = {file: ("Cell", "In[3]")}
    shell = types.SimpleNamespace(compile=types.SimpleNamespace(format_code_name=names.get))
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    assert shortened(f"{file}:12:4 (loss)") == "cell 3, line 12 (loss)"
    assert (
        shortened(f"at {file}:12 (loss); {pathlib.__file__}:3")
        == f"at cell 3, line 12 (loss); {pathlib.__file__}:3"
    )
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: None))
    assert shortened(f"{file}:12:4 (loss)") == f"{file}:12:4 (loss)"


def test_two_lines_around_each_line_are_shown_and_twenty_kinds_of_operations():
    def loss(w, x):
        y = [jnp.sum(x[:n] @ w) for n in range(1, 24)]  # A matmul and a sum of each size.
        del x
        del w
        return y

    page = page_of(loss, W, X, dtype="float16")
    first = loss.__code__.co_firstlineno
    numbers = [int(row[0]) for row in Lines(page).rows if row and row[0].isdigit()]
    assert [number for number in numbers if first - 3 <= number <= first + 5] == [
        *range(first - 1, first + 4)
    ]
    assert re.search(r"and \d+ more</div></details>", page)
    (count,) = re.findall(r"and (\d+) more", page)
    kinds = {
        (o.name, *o.inputs, *o.outputs) for o in jmp.explain(jmp.autocast(loss, "float16"))(W, X).operations
    }
    assert int(count) == len(kinds) - 20


def test_the_first_sentence_says_how_many_matmuls_are_not_in_half_and_why():
    def fun(w, x):
        with jax.named_scope("head"):
            a = x @ w
        b = jmp.full_precision(jnp.matmul)(x, w) @ w
        return a, b

    page = page_of(fun, W, X, dtype="float16", rules={"head": "float32"})
    assert "<div>2 of 3 matmuls are not in half precision: 1 (the rule for &#x27;head&#x27;), 1 (" in page
    page = page_of(fun, W, X, dtype="float16", rules={"head": "float32"}, deny=["dot_general"])
    assert "1 of 1" not in page
    assert "<div>All 1 matmuls run in half precision.</div>" in page_of(jnp.dot, W, X.T, dtype="float16")


def test_equal_layers_or_too_many_modules_are_one_row_and_a_matmul_in_float32_is_red():
    def fun(w, x):
        for name in string.ascii_lowercase:
            with jax.named_scope(f"mixture/experts/{name}"):
                x = x @ w
        for number in range(3):
            with jax.named_scope(f"layer_{number}/attn"):
                x = jnp.einsum("bi,io->bo", x, w)
        return jmp.full_precision(jnp.matmul)(x, w)

    page = page_of(fun, W, X, dtype="float16")
    assert ">layer_0 … layer_2/attn, 3 alike</a>" in page
    assert ">mixture/experts</a>" in page
    assert "io-&gt;bo" not in page.split("<table>")[1].split("</table>")[0]
    assert "<span class='chip left'>f32 <small>option</small></span>" in page

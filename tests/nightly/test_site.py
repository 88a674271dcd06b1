"""The site of the documents: a search finds the guides before reports, as the site's own search program ranks them."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ASK = """
const fs = require('fs');
const [worker, index, ...queries] = process.argv.slice(1);
globalThis.self = globalThis;
globalThis.location = new URL('http://127.0.0.1/search/worker.js');
globalThis.importScripts = () => {};
const answers = [];
globalThis.postMessage = (message) => { answers.push(message); };
globalThis.addEventListener = (_, listener) => { globalThis.listener = listener; };
(0, eval)(fs.readFileSync(worker, 'utf8'));
const {config, docs} = JSON.parse(fs.readFileSync(index, 'utf8'));
(async () => {
  const send = async (message) => { await globalThis.listener({data: message}); };
  await send({type: 0, data: {config, docs, options: {suggest: false}}});
  for (const query of queries) await send({type: 2, data: query});
  const found = answers.filter((answer) => answer.type === 3);
  console.log(JSON.stringify(found.map((answer) => answer.data.items.map((pages) => pages[0].location))));
})();
"""
QUERIES = ("pull", "worker dies", "speculation", "adapters", "drain", "faults", "first token", "quantised")
GUIDE = re.compile(r"docs/(?!api|cli|performance)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [str(Path(sys.executable).parent / "mkdocs"), "build", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_a_search_finds_guides_before_reports(site: Path) -> None:
    (worker,) = site.glob("assets/javascripts/workers/search.*.min.js")
    index = site / "search/search_index.json"
    command = ["node", "-e", ASK, str(worker), str(index), *QUERIES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for query, pages in zip(QUERIES, json.loads(done.stdout), strict=True):
        reports = [rank for rank, page in enumerate(pages) if page.startswith("bench/reports/")]
        guides = [rank for rank, page in enumerate(pages) if GUIDE.match(page)]
        assert reports, query
        assert max(guides[:3]) < min(reports), (query, pages)

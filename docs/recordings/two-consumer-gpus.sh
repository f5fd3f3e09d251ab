# What the guide's first two steps leave, but for the weights, which no plan reads: the configuration
# of Llama-3.1-8B, and fine_tune.py with a base in bfloat16.
set -euo pipefail
sed -e 's/LENGTH, RATE = HERE \/ "base", 32, 2e-3/LENGTH, RATE = HERE \/ "base", 1024, 2e-4/' \
    -e 's/use_cache=False))/use_cache=False), dtype=torch.bfloat16)/' \
    "$1/docs/examples/fine_tune.py" >fine_tune.py
grep -q 'dtype=torch.bfloat16' fine_tune.py
grep -q '"base", 1024' fine_tune.py
python - <<'PYTHON'
import json
from pathlib import Path

import planner

catalog = Path(planner.__file__).parent / "catalog" / "models.json"
llama = json.loads(catalog.read_text(encoding="utf-8"))["llama"]
sizes = dict(zip(llama["fields"].split(), llama["sizes"]["llama-3-8b"], strict=True))
Path("base").mkdir()
config = {"model_type": "llama", "architectures": [llama["architecture"]], **sizes}
Path("base/config.json").write_text(json.dumps(config), encoding="utf-8")
PYTHON

"""Makes rows.csv, rows.parquet, small.parquet and expected.json: what scikit-learn and pandas make of a table with gaps.

    pip install scikit-learn pandas pyarrow
    python make.py
"""

import json
import random

import numpy as np
import pandas as pd
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import LabelEncoder, OneHotEncoder, StandardScaler

random.seed(1)
ROWS, TRAIN = 240, 200
rows = []
for i in range(ROWS):
    rows.append({
        "area": random.choice([None, round(random.uniform(20, 200), 2), round(random.gauss(80, 5), 3)]),
        "rooms": random.choice([None, 1, 2, 2, 3, 3, 4, 5]),
        "level": random.choice([0.1, 0.1]),
        "huge": None if i % 7 == 3 else 1e9 + random.randrange(1000),
        # "Uppsala" is in no row of the training part.
        "city": "Uppsala" if i == TRAIN + 5 else random.choice([None, "Oslo", "Bergen", "São Paulo", "a,b \"c\"", "1st"]),
        "kind": random.choice(["new", "old", None]),
        "price": round(random.gauss(300, 60), 1),
        "class": random.choice(["yes", "no", "maybe"]),
    })
table = pd.DataFrame(rows)
table.to_csv("rows.csv", index=False, na_rep="NA")
table.to_parquet("rows.parquet", index=False, row_group_size=100, compression="snappy")
table[:3].to_parquet("small.parquet", index=False, compression="gzip")

numbers, categories = ["area", "rooms", "level", "huge"], ["city", "kind"]
train = table[:TRAIN]
expected = {"train": TRAIN, "transformed": {}}
for fill in ["mean", "median", "most_frequent", "-3.5"]:
    constant = {"strategy": "constant", "fill_value": float(fill)} if fill == "-3.5" else {"strategy": fill}
    features = ColumnTransformer(
        [(name, make_pipeline(SimpleImputer(**constant), StandardScaler()), [name]) for name in numbers]
        + [(name, make_pipeline(
            SimpleImputer(strategy="constant", fill_value="none", missing_values=None) if (name, fill) == ("kind", "median")
            else SimpleImputer(strategy="most_frequent", missing_values=None),
            OneHotEncoder(handle_unknown="ignore", sparse_output=False)), [name]) for name in categories])
    filled = train.astype({name: object for name in categories}).replace({np.nan: None})
    whole = table.astype({name: object for name in categories}).replace({np.nan: None})
    for frame in (filled, whole):
        for name in numbers:
            frame[name] = frame[name].astype(float)
    features.fit(filled)
    expected["transformed"][fill] = features.transform(whole).tolist()
target = StandardScaler().fit(train[["price"]])
expected["price"] = target.transform(table[["price"]])[:, 0].tolist()
expected["class"] = LabelEncoder().fit_transform(table["class"]).tolist()
with open("expected.json", "w") as file:
    json.dump({key: json.loads(json.dumps(value), parse_float=lambda x: float(f"{float(x):.8g}")) for key, value in expected.items()}, file)
    file.write("\n")

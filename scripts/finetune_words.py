"""The baseline without pretraining: logistic regression on words and runs of characters."""

import time
import warnings

from finetune_data import Example
from finetune_tasks import Task
from finetune_train import Run

from data_pipeline.common.errors import check

STRENGTHS = (0.1, 1.0, 10.0, 100.0)  # of C, the inverse of the penalty


def vectorize(train: list[Example], others: list[list[Example]]) -> list:
    """Turn the texts of examples into weighted counts of words, word pairs and 1 to 4 characters.

    Features are chosen and weighted on `train`. Of two sentences each has features of its own.
    Returns a sparse matrix for `train` and each of the others. Raises `UserError` if no text of
    `train` has a character.
    """
    from scipy.sparse import hstack
    from sklearn.feature_extraction.text import TfidfVectorizer

    found = [[] for _ in (train, *others)]
    for column in range(len(train[0].texts)):
        texts = [[e.texts[column] for e in examples] for examples in (train, *others)]
        for analyzer, longest in (("word", 2), ("char", 4)):
            words = {"token_pattern": r"\w+"} if analyzer == "word" else {}
            vectorizer = TfidfVectorizer(
                analyzer=analyzer, ngram_range=(1, longest), sublinear_tf=True, **words
            )
            try:
                vectorizer.fit(texts[0])
            except ValueError:  # no word in any of the texts
                continue
            for matrices, part in zip(found, texts, strict=True):
                matrices.append(vectorizer.transform(part))
    check(found[0], f"no text has a character among the {len(train):,} to train a bag of words on")
    return [hstack(matrices).tocsr() for matrices in found]


def fit_words(
    task: Task, train: list[Example], matrices: list, strength: float, evaluated: list
) -> Run:
    """Fit on the first matrix and predict the others: dev, then test if there is one.

    evaluated: examples of the other matrices.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.preprocessing import MultiLabelBinarizer

    start = time.perf_counter()
    model = LogisticRegression(C=strength, max_iter=300)
    labels = [example.label for example in train]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # steps are used up; a label is in all or none
        if isinstance(labels[0], list):
            sets = MultiLabelBinarizer(classes=task.labels)
            model = OneVsRestClassifier(model).fit(matrices[0], sets.fit_transform(labels))
            rows = [model.predict(m).reshape(m.shape[0], -1) for m in matrices[1:]]  # (N, labels)
            found = [sets.inverse_transform(part) for part in rows]
        elif len(set(labels)) == 1:  # --max-train may draw so few
            found = [labels[:1] * matrix.shape[0] for matrix in matrices[1:]]
        else:
            model.fit(matrices[0], labels)
            found = [list(model.predict(m)) for m in matrices[1:]]
    run = Run([task.score(evaluated[0], found[0])], 0, *found[1:])
    run.seconds = time.perf_counter() - start
    return run

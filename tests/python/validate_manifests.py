"""Checks Kubernetes manifests against the strict schemas of several versions.

    validate_manifests.py VERSIONS FILE...

VERSIONS is a list with commas, such as 1.30,1.36. Custom resources of others are passed over by name. Prints one line
for each finding, and how many objects were checked; exits 1 when there were findings.
"""

import sys

import kubernetes_validate
import yaml

# Kinds whose schemas are not Kubernetes' own.
OTHERS = {"monitoring.coreos.com/v1", "hearth.dev/v1alpha1", "keda.sh/v1alpha1"}


def findings(path: str, document: dict, versions: list[str]):
    name = f"{document.get('kind')} {document.get('metadata', {}).get('name')}"
    for version in versions:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            where = ".".join(str(part) for part in error.path)
            yield f"{path}: {name}, Kubernetes {version}: {where}: {error.message}"
        except kubernetes_validate.SchemaNotFoundError as error:
            yield f"{path}: {name}, Kubernetes {version}: {error.message}"


def main() -> int:
    versions = sys.argv[1].split(",")
    checked, wrong = 0, 0
    for path in sys.argv[2:]:
        with open(path, encoding="utf-8") as file:
            for document in yaml.safe_load_all(file):
                if not document or document["apiVersion"] in OTHERS:
                    continue
                checked += 1
                for line in findings(path, document, versions):
                    wrong += 1
                    print(line)
    print(f"{checked} objects, {len(versions)} versions, {wrong} findings")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""What of a working folder does not travel with a run: what looks like a secret, by its name or by how it begins. Pure.

It is a net and no wall: a password in a script's text is not seen. What it takes out is told by name, and whoever
wants it on the other hosts all the same names the file itself in a list (`--files`).
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

LOOKED_AT = 64 * 1024  # bytes of a file's beginning

FOLDERS = {".aws", ".ssh", ".gnupg", ".azure", ".gcloud", ".kube", ".docker", ".kaggle"}
NAMES = {
    ".env", ".netrc", "_netrc", ".pgpass", ".pypirc", ".git-credentials", ".htpasswd", ".boto", ".s3cfg",
    ".vault-token", ".dockercfg", ".aws", ".credentials", "credentials", "credentials.json", "kubeconfig",
    "kaggle.json", "id_rsa", "id_dsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk",
}  # fmt: skip
SUFFIXES = (".pem", ".key", ".p12", ".pfx", ".jks", ".keystore", ".kdbx", ".ppk", ".ticket", ".tfstate", ".env")
SHOWN = {"example", "sample", "template", "dist"}  # .env.example is made to be shown
CONTENT = re.compile(
    rb"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:\s|\\[rn])+(?:[A-Za-z0-9+/=]{16}|Proc-Type)"
    rb"|PuTTY-User-Key-File-\d"
    rb"|aws_secret_access_key[\"']?\s*[=:]\s*[\"']?[A-Za-z0-9/+=]{30}"
    rb"|\"secret\":\s*\"[0-9a-f]{64}\""  # a run's ticket
)


def by_name(name: str) -> bool:
    """Whether `name`, relative to the working folder, looks like a secret's."""
    *folders, last = (part.casefold() for part in PurePosixPath(name).parts)
    if last in NAMES or last.endswith(SUFFIXES) or not FOLDERS.isdisjoint(folders):
        return True
    return last.startswith(".env.") and last.rpartition(".")[2] not in SHOWN


def by_content(content: bytes) -> bool:
    """Whether a file that begins with `content` holds a private key, an AWS secret or a ticket."""
    return CONTENT.search(content[:LOOKED_AT]) is not None

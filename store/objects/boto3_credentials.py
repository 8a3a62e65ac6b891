"""boto3's credentials for obstore, handed out with their own end.

obstore's own provider says of each that it lasts for half an hour more. One that another process
got earlier, or that a program or a role gives for less, ends before, and every request until then
would be refused. Imports boto3: nothing but an option that names it may import this.
"""

from __future__ import annotations

from datetime import UTC
from typing import TYPE_CHECKING, Any

from obstore.auth.boto3 import Boto3CredentialProvider

if TYPE_CHECKING:
    from obstore.store import S3Credential


class Boto3Credentials(Boto3CredentialProvider):
    """Asks boto3 again before the credentials' own end, and every half an hour at the latest."""

    def __call__(self) -> S3Credential:
        """Return what boto3 has now; it renews what ends within ten minutes."""
        handed_out = super().__call__()
        credentials: Any = self.credentials
        # Those that never end, as from a file, have no such attribute.
        ends = getattr(credentials, "_expiry_time", None)
        if ends is not None and ends < handed_out["expires_at"]:
            handed_out["expires_at"] = ends.astimezone(UTC)
        return handed_out

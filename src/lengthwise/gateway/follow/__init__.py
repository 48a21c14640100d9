"""The schedule follows the lengths of its own traffic: watched and planned anew beside the event loop."""

from lengthwise.gateway.follow.following import Care, Following
from lengthwise.gateway.follow.told import Followed, Follower, Make, News

__all__ = ["Care", "Followed", "Follower", "Following", "Make", "News"]

"""The tensor axis: heads, feed-forward columns and vocabulary divided; sequences between blocks."""

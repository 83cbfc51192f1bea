"""What a public function checks of its arguments, and what its errors say."""

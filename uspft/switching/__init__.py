"""Hot switching: each row under the layout that suits its length, several layouts in one step."""

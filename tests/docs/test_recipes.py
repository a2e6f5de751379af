"""docs/recipes.md says of every public launch command what its outcome is, and links to where it is from."""

import recipe_table


def test_the_table_is_what_the_data_says():
    page = recipe_table.PAGE.read_text()
    table = page.partition(recipe_table.BEGIN + "\n")[2].partition("\n" + recipe_table.END)[0]
    assert table == recipe_table.table(), "python tests/docs/recipe_table.py prints it anew"


def test_a_cell_ends_where_its_column_does():
    rows = recipe_table.table().splitlines()
    assert {row.count(" | ") for row in rows if not row.startswith("|--")} == {len(recipe_table.HEAD) - 1}
    assert all(recipe.source.startswith("https://") for recipe in recipe_table.RECIPES.values())
